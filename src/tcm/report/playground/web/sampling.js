// From noise to images, as tcm.method.sampling does it. `f(x, t, classes)` evaluates the network on a batch.

import { normal } from "./noise.js";

const COMPLETION_STEPS = 4;

/** x ← f(x + t ε, t) for each of `times`, from x = 0; `noise(step)` is the batch's ε of a step. */
export async function consistencySteps(f, times, noise, classes) {
  let x = null;
  for (const [step, t] of times.entries()) x = await f(noised(x, t, noise(step)), t, classes);
  return x;
}

/** The noises of some seeds at a step, one after the other. */
export function noisesOf(seeds, step, size) {
  const noises = new Float32Array(seeds.length * size);
  seeds.forEach((seed, i) => noises.set(normal(seed, step, size), i * size));
  return noises;
}

/**
 * A picture completed by the model: at each of some times from T down to t, what is known replaces what the model made
 * of it, gets noise and goes through f again. With everything known that is f(picture + t ε, t).
 *
 * `known` has a number per value of the picture: 1 where it is known, 0 where the model decides.
 */
export async function completion(f, { picture, known, seed, t, tMax, classes }) {
  const everything = known.every((value) => value === 1);
  const times = everything ? [t] : spacedTimes(tMax, t, COMPLETION_STEPS);
  let made = null;
  let given = null;
  for (const [step, time] of times.entries()) {
    const clean = picture.map((value, i) => (known[i] ? value : made === null ? 0 : made[i]));
    given = noised(clean, time, normal(seed, step, picture.length));
    made = await f(given, time, classes);
  }
  return { given, made };
}

/** Times from T down to t, evenly spaced in ln t. */
export function spacedTimes(tMax, t, steps) {
  if (t >= tMax) return [tMax];
  return Array.from({ length: steps }, (_, i) => (i === steps - 1 ? t : tMax * (t / tMax) ** (i / (steps - 1))));
}

/** x + t ε, rounded to float32 after each operation as torch rounds; no x is 0. */
export function noised(x, t, noise) {
  const scale = Math.fround(t);
  return noise.map((value, i) => Math.fround(scale * value) + (x === null ? 0 : x[i]));
}
