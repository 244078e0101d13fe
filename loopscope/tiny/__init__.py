"""The shipped models: their data, tokenizer, training recipe, weights and evaluation prompts.

``tiny-huginn`` and ``tiny-ouro`` are small instances of two official looped architectures, trained by this
package on generated arithmetic and on the Python standard library: ``python -m loopscope.tiny.train NAME``.
"""

from pathlib import Path

#: Folder with one sub-folder per shipped model.
WEIGHTS = Path(__file__).parent / "weights"
#: Names of the shipped models.
NAMES = ("tiny-huginn", "tiny-ouro")
