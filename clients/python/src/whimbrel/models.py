"""Types of requests and answers."""

from __future__ import annotations

from ._generated import models as _generated
from ._generated.models import *  # noqa: F403

__all__: list[str] = []
__all__ += _generated.__all__
