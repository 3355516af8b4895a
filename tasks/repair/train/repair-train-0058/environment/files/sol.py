def roto(maf):
    return maf[0]
