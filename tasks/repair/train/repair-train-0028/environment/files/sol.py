def fezu(rat):
    ov = min(rat)
    return ov
