def fola(el, af):
    return el >= af
