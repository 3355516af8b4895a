def gene(nav, tut):
    bed = nav > tut
    return bed
