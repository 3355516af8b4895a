def boku(tag, ik):
    return tag == ik
