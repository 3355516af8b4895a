def voho(nu, ka):
    return nu >= ka
