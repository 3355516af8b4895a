def wega(boz):
    return max(boz)
