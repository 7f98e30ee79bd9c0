"""Written by the build: what the compiled extension was made for."""

VERSION: str
TORCH_VERSIONS: list[str]
TORCH_TESTED: tuple[str, str]
BUILD_INFO: str
CUDA_NOTE: str
