"""The app for SGLang's HTTP workers (`--tokenizer-worker-num` above 1), which load no plugins by themselves.

`flags` puts this module in the place of the app that was to be served, and this module serves that app.
"""

from __future__ import annotations

import os
import pkgutil
from typing import Any

from sglang.srt.plugins import load_plugins

from . import flags, settings

load_plugins()
_asked = settings.read()
if _asked.broker or _asked.measure is not None:
    # Loading hooked only what had been imported by then.
    flags.switch_on(_asked, main=True)

app: Any = pkgutil.resolve_name(os.environ.get(flags.SERVED_APP) or "sglang.srt.entrypoints.http_server:app")
