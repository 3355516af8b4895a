def malu(hu, up):
    zi = hu >= up
    return zi
