def tome(fal):
    return max(fal)
