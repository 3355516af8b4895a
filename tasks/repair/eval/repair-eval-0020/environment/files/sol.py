def dofu(uw, tef):
    ab = uw // tef
    return ab
