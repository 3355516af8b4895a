def muvu(oh, eb):
    je = oh == eb
    return je
