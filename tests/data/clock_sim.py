"""Reference of tests/src/clock_sim: writes clock_sim.json. Needs numpy: python3 clock_sim.py > clock_sim.json

All in microseconds. Random numbers come from SplitMix64, so that another language can draw the same ones.
"""
import json
import numpy as np


class Random:
    def __init__(self, seed):
        self.state = seed

    def random(self, n):
        i = np.arange(1, n + 1, dtype=np.uint64)
        z = np.uint64(self.state) + i * np.uint64(0x9E3779B97F4A7C15)
        self.state = (self.state + int(n) * 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return ((z ^ (z >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53

    def uniform(self, low, high, n):
        return low + (high - low) * self.random(n)

    def normal(self, sd, n):  # Box and Muller
        u = self.random(2 * n).reshape(n, 2)
        return sd * np.sqrt(-2 * np.log(1 - u[:, 0])) * np.cos(2 * np.pi * u[:, 1])

    def exponential(self, mean, n):
        return -mean * np.log(1 - self.random(n))

    def pareto(self, a, n):
        return (1 - self.random(n)) ** (-1 / a) - 1


BASE_PPM = 210.0


def device_clock(T, wander, rng):
    dt = 0.05
    n = int((T + 20) / dt) + 2
    t = np.arange(n) * dt
    w = np.zeros(n)  # ppm on top of BASE_PPM
    if wander != "const":
        w += 0.2 * np.sin(2 * np.pi * t / 1200 + rng.uniform(0, 6.28, 1)[0])
        w += np.cumsum(rng.normal(0.01 * np.sqrt(dt), n))
    if wander == "thermal":  # the board's crystal heats and cools with load
        for frac, a in ((0.3, 4.0), (0.65, -4.0)):
            s = t - frac * T
            w += np.where(s > 0, a * (1 - np.exp(-np.clip(s, 0, None) / 25.0)), 0)
    off = np.concatenate([[0], np.cumsum(w[:-1] * 1e-6 * dt * 1e6)])
    return lambda h: h * (1 + BASE_PPM * 1e-6) + np.interp(h, t * 1e6, off)


def delays(rng, n, kind):
    body = np.exp(np.log(0.5) + 0.8 * rng.normal(1.0, n))
    p1, p2 = dict(quiet=(0.01, 0.0005), std=(0.04, 0.005), busy=(0.08, 0.01), awful=(0.25, 0.05))[kind]
    u = rng.random(n)
    body = body + np.where(u < p1, rng.exponential(60, n), 0)
    preempted = rng.random(n) < p2
    return body + np.where(preempted, np.minimum(200 * rng.pareto(1.3, n) + 100, 8000), 0)


def run(T, f, K, q, wander, m1, m2, noise, seed, nq):
    rng = Random(seed)
    D = device_clock(T, wander, rng)
    nb = int(T * f)
    start = (np.arange(nb) + rng.uniform(0, 0.3, nb)) / f * 1e6
    a1 = delays(rng, nb * K, noise).reshape(nb, K)
    a2 = delays(rng, nb * K, noise).reshape(nb, K)
    if noise in ("busy", "awful"):
        # The whole burst queues behind work on the device.
        busy = rng.random(nb) < (0.35 if noise == "busy" else 0.6)
        a1 += np.where(busy[:, None], rng.uniform(2, 400, nb * K).reshape(nb, K), 0)
        # The host is noisy for 20 s (interrupts, power states).
        epoch = (start / 20e6).astype(int)
        noisy = rng.random(epoch.max() + 2) < 0.15
        a2 += np.where(noisy[epoch][:, None], rng.exponential(12, nb * K).reshape(nb, K) + 3, 0)
    d1, d2 = m1 + a1, m2 + a2
    dur = d1 + d2 + 1.0
    h0 = start[:, None] + np.cumsum(dur, 1) - dur
    event = h0 + d1
    queries = np.sort(rng.uniform(0.5e6, (T - 0.5) * 1e6, nq))
    device = lambda h: np.floor(D(h) / q) * q
    return dict(
        before=h0.ravel().tolist(),
        after=(event + d2).ravel().tolist(),
        device=device(event).ravel().tolist(),
        queries=queries.tolist(),
        query_device=device(queries).tolist(),
    )


CASES = [
    dict(T=3, f=2.0, K=4, q=0.5, wander="const", m1=4.0, m2=4.0, noise="quiet", seed=1, nq=6),
    dict(T=5, f=2.0, K=4, q=0.5, wander="mild", m1=4.0, m2=4.0, noise="std", seed=2, nq=6),
    dict(T=8, f=2.0, K=3, q=0.032, wander="thermal", m1=7.0, m2=1.0, noise="busy", seed=3, nq=6),
    dict(T=8, f=1.0, K=2, q=1.0, wander="thermal", m1=5.5, m2=2.5, noise="awful", seed=4, nq=6),
]
print(json.dumps([dict(case, **run(**case)) for case in CASES]))
