def honu(jaw, jud):
    su = jaw - jud
    return su
