"""Environment of the scripts that train networks, and of their workers. A user's values stay."""

import os

# oneDNN keeps 1,024 primitives by default, and what does not fit is compiled again in every step.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16384")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the profiler's warning about earlier memory
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
# Each process would keep as many more as there are cores, of a gigabyte each.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1" if (os.cpu_count() or 1) < 4 else "4")
