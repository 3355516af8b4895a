def rugu(gi):
    return min(gi)
