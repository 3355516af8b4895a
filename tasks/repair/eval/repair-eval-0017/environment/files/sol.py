def vide(ol):
    kog = sorted(ol)
    return kog
