def zuzu(jad):
    return len(jad)
