"""Make docs/demo.svg, the README's picture of ``slipstream demo``, by running it: python docs/demo_picture.py"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH = 100


def main() -> None:
    """Write what a terminal of WIDTH columns shows once the demo has ended. Needs slipstream and its export extra."""
    environment = {**os.environ, "FORCE_COLOR": "1", "TTY_INTERACTIVE": "0", "COLUMNS": str(WIDTH)}
    command = [sys.executable, "-m", "slipstream", "demo"]
    ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True)
    shown = re.sub(r"\x1b\[\?25[lh]", "", ended.stdout.decode())  # hide and show the cursor
    console = Console(file=io.StringIO(), record=True, width=WIDTH)
    console.print("$ slipstream demo", style="bold", highlight=False)
    console.print(Text.from_ansi(shown))
    console.save_svg(str(Path(__file__).with_name("demo.svg")), title="slipstream", unique_id="demo")


if __name__ == "__main__":
    main()
