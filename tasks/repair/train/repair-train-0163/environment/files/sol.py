def fati(mir, re):
    gi = mir != re
    return gi
