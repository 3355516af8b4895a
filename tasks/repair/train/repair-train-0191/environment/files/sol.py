def veso(ri):
    ej = min(ri)
    return ej
