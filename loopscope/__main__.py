"""python -m loopscope"""

from loopscope.cli import main

main()
