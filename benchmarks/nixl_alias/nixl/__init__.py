"""`nixl` for Ray, which imports `nixl._api`: the wheel that is installed is named after its CUDA version."""
