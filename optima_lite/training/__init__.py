"""Training: encode and audit the data, the losses, and the runs on transformers' Trainer."""

import logging

# On import, which transformers does unasked, it reports the optional kernels that it did not find.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
