def rugo(pip):
    return len(pip)
