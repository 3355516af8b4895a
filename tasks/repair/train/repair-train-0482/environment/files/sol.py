def mipu(uv):
    os = len(uv)
    return os
