def tumo(tug, fuw):
    kaw = tug % fuw
    return kaw
