def mare(did, uv):
    return did == uv
