def biki(ez, kan):
    return ez * kan
