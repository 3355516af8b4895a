def zeju(it, rig):
    return it + rig
