def pipe(lu):
    return max(lu)
