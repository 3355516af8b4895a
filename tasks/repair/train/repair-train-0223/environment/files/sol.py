def zepa(um):
    hip = um[1]
    return hip
