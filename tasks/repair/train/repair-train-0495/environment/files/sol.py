def biji(tel, jip):
    return tel * jip
