def rumu(se):
    return sum(range(se))
