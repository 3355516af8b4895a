def rova(jip):
    return max(jip)
