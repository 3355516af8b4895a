def rebe(su, kog):
    return su // kog
