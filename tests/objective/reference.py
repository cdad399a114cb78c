"""The paper's equations, written as plainly as possible in linear space. Shares no code with the package.

e1, e2 are the features of the whole global batch B; rank k of K holds its k-th part.
"""

import torch


def negatives(B, groups):
    """1 where j is a negative of i: another sample, or one of another group."""
    if groups is None:
        return 1 - torch.eye(B, dtype=torch.float64)
    return (groups[:, None] != groups).double()


def inner(e1, e2, tau1, tau2, others):
    """g_1, g_2 of every sample: the mean over its negatives."""
    s = e1 @ e2.T
    n = others.sum(1)
    own = s.diagonal()
    l1 = torch.exp((s - own[:, None]) / tau1[:, None])
    l2 = torch.exp((s.T - own[:, None]) / tau2[:, None])
    return (l1 * others).sum(1) / n, (l2 * others).sum(1) / n


def moving_average(u, g, gamma):
    """eq. (u:ema); an unvisited sample has u = NaN here and takes g."""
    return torch.where(torch.isnan(u), g, (1 - gamma) * u + gamma * g)


def scent_gamma(u, least):
    """σ(10 + log u), at least `least`."""
    return torch.sigmoid(10 + torch.log(u)).clamp(min=least)


def rank_gradients(e1, e2, tau1, tau2, w1, w2, k, K, others):
    """G_{w,a,k} + G_{w,b,k} with respect to rank k's features; w_i is the factor before 1/|B_i-| Σ ∇ℓ.

    eqs. (sogclr:gradw:1) and (sogclr:gradw:2): w_i = τ/(ε + u_i); (fastclipv0:gradw): w_i = 1/(ε + u_i);
    (isogclr:gradw): w_i = τ_i/(ε + u_i).
    """
    B, b = len(e1), len(e1) // K
    mine = torch.zeros(B, dtype=torch.bool)
    mine[k * b : (k + 1) * b] = True
    x1, x2 = e1.clone().requires_grad_(), e2.clone().requires_grad_()
    n = others.sum(1)

    # part a: i is local, its partners e_j are constants
    own = (x1 * x2).sum(1)
    l1 = torch.exp(((x1 @ e2.T) - own[:, None]) / tau1[:, None]) * others
    l2 = torch.exp(((x2 @ e1.T) - own[:, None]) / tau2[:, None]) * others
    per_sample = w1 * l1.sum(1) / n + w2 * l2.sum(1) / n
    a = per_sample[mine].sum() / b

    # part b: i is anywhere and constant, the partner j is local
    own = (e1 * e2).sum(1)
    l1 = torch.exp(((e1 @ x2.T) - own[:, None]) / tau1[:, None]) * others
    l2 = torch.exp(((e2 @ x1.T) - own[:, None]) / tau2[:, None]) * others
    factor = 1 / b * B / n
    inner_sum = w1 * l1[:, mine].sum(1) * factor + w2 * l2[:, mine].sum(1) * factor
    part_b = inner_sum.sum() / B

    (a + part_b).backward()
    return x1.grad[mine], x2.grad[mine]


def inner_tau_derivative(e1, e2, tau1, tau2, others):
    """1/|B_i-| Σ_j ∇_3 ℓ(e_i, e_j, τ_i) of every sample and side."""
    t1, t2 = tau1.clone().requires_grad_(), tau2.clone().requires_grad_()
    g1, g2 = inner(e1, e2, t1, t2, others)
    (g1.sum() + g2.sum()).backward()
    return t1.grad, t2.grad


class PaperRun:
    """Algorithm 1 in one process: stores u (and τ) of n samples; returns values and gradients."""

    def __init__(
        self, name, n, *, tau, rho=0.0, epsilon=1e-14, tau_lr=0.0, betas=(0.9, 0.999), released=False
    ):
        self.name, self.n, self.rho, self.epsilon, self.released = name, n, rho, epsilon, released
        self.u1, self.u2 = torch.full((2, n), torch.nan, dtype=torch.float64)
        self.tau1, self.tau2 = torch.full((2, n), tau, dtype=torch.float64)
        self.tau_lr, self.betas = tau_lr, betas
        self.moments = {i: [0.0, 0.0, 0.0, 0.0, 0] for i in range(n)}

    def step(self, e1, e2, ids, gamma, groups=None):
        """Returns value, image gradients, text gradients, G_τ (None where τ is constant or individual).

        Samples with equal `groups` are not negatives of each other; without any negatives nothing happens.
        """
        others = negatives(len(e1), groups)
        if not others.any():
            learned = self.name in ("fastclip-v0", "mbcl", "fastclip-v3", "scent")
            return 0.0, torch.zeros_like(e1), torch.zeros_like(e2), 0.0 if learned else None
        tau1, tau2 = self.tau1[ids], self.tau2[ids]
        g1, g2 = inner(e1, e2, tau1, tau2, others)
        if self.name == "mbcl":
            u1, u2, eps = g1, g2, 1 / others.sum(1)
        else:
            gamma1, gamma2 = gamma, gamma
            if self.name == "scent":
                gamma1, gamma2 = scent_gamma(self.u1[ids], gamma), scent_gamma(self.u2[ids], gamma)
            u1 = moving_average(self.u1[ids], g1, gamma1)
            u2 = moving_average(self.u2[ids], g2, gamma2)
            eps = self.epsilon
        unscaled = self.name in ("fastclip-v0", "mbcl")  # the loss without τ in front
        w1, w2 = (1 if unscaled else tau1) / (eps + u1), (1 if unscaled else tau2) / (eps + u2)
        grad1, grad2 = rank_gradients(e1, e2, tau1, tau2, w1, w2, 0, 1, others)
        log1, log2 = torch.log(eps + u1), torch.log(eps + u2)
        d1, d2 = inner_tau_derivative(e1, e2, tau1, tau2, others)
        from_inner = (d1 / (eps + u1)).mean() + (d2 / (eps + u2)).mean()
        value, tau_grad = None, None
        if self.name in ("fastclip-v0", "mbcl"):
            value = (log1 + log2).mean()
            tau_grad = from_inner  # eq. (fastclipv0:gradtau)
        elif self.name in ("sogclr", "fastclip-v1"):
            value = tau1[0] * (log1 + log2).mean()
        elif self.name in ("fastclip-v3", "scent"):
            value = tau1[0] * (log1 + log2).mean() + 2 * self.rho * tau1[0]
            tau_grad = (log1 + log2).mean() + 2 * self.rho + tau1[0] * from_inner  # eq. (fastclipv3:gradtau)
        elif self.name in ("isogclr", "fastclip-v2"):
            value = (tau1 * (log1 + self.rho) + tau2 * (log2 + self.rho)).mean()
            # n times eq. (isogclr:gradtau)
            tau_grad1 = log1 + self.rho + tau1 * d1 / (eps + u1)
            tau_grad2 = log2 + self.rho + tau2 * d2 / (eps + u2)
            self._adam(ids, tau_grad1, tau_grad2)
        if self.name == "mbcl":
            value, grad1, grad2, tau_grad = value / 2, grad1 / 2, grad2 / 2, tau_grad / 2
        if self.released:
            value, grad1, grad2 = value / 2, grad1 / 2, grad2 / 2
            if self.name == "fastclip-v3":
                # the released code differentiates inner/1 + ρ·τ + mean(log u1 + log u2)·τ/2
                tau_grad = tau1[0] * from_inner + self.rho + (torch.log(u1) + torch.log(u2)).mean() / 2
        if self.name != "mbcl":
            for position in reversed(range(len(ids))):  # of equal ids the first one writes last
                self.u1[ids[position]], self.u2[ids[position]] = u1[position], u2[position]
        return value, grad1, grad2, tau_grad

    def _adam(self, ids, gradient1, gradient2):
        """Proc. parameter_update (AdamW, λ = 0, ϵ = 1e-8) for the first of equal ids."""
        beta1, beta2 = self.betas
        seen = set()
        for position, i in enumerate(ids.tolist()):
            if i in seen:
                continue
            seen.add(i)
            state = self.moments[i]
            state[4] += 1
            for side, (gradient, tau) in enumerate(((gradient1, self.tau1), (gradient2, self.tau2))):
                G = float(gradient[position])
                state[2 * side] = beta1 * state[2 * side] + (1 - beta1) * G
                state[2 * side + 1] = beta2 * state[2 * side + 1] + (1 - beta2) * G**2
                m_hat = state[2 * side] / (1 - beta1 ** state[4])
                v_hat = state[2 * side + 1] / (1 - beta2 ** state[4])
                moved = float(tau[i]) - self.tau_lr * m_hat / (v_hat**0.5 + 1e-8)
                tau[i] = min(max(moved, 0.01), 1.0)
