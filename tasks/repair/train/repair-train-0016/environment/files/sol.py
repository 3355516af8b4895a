def giji(eg, lid):
    return eg <= lid
