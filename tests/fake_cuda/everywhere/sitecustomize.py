"""With this folder and the one above in PYTHONPATH all Python processes have the fake device, those that others start too."""

import fake_device  # noqa: F401
