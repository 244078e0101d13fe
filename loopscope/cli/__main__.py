"""python -m loopscope.cli"""

from loopscope.cli import main

main()
