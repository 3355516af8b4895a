def rivu(um, pa):
    return um - pa
