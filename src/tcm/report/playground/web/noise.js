// What a seed stands for, as tcm.foundation.randomness and tcm.method.conditions define it: its noises and its class.

import { blake2b } from "./blake2b.js";
import { philoxWords } from "./philox.js";

/** The standard normal noise of a seed: `draw` is 0 for the first step, 1 for the second. */
export function normal(seed, draw, count) {
  const words = philoxWords(BigInt(seed), draw, Math.ceil(count / 2));
  const noise = new Float32Array(2 * words.length);
  words.forEach((word, i) => {
    const radius = Math.sqrt(-2 * Math.log((Number(word & 0xffffffffn) + 0.5) / 2 ** 32));
    const angle = Number(word >> 32n) * ((2 * Math.PI) / 2 ** 32);
    noise[2 * i] = radius * Math.cos(angle);
    noise[2 * i + 1] = radius * Math.sin(angle);
  });
  return noise.subarray(0, count);
}

/** The class that a seed draws. */
export function classOf(seed, classes) {
  return Number(blake2b(`('class', ${seed})`, 16) % BigInt(classes));
}

/** The point of the arc from one noise (position 0) to another (1): a standard normal noise too. */
export function between(from, to, position) {
  const [a, b] = [Math.cos((position * Math.PI) / 2), Math.sin((position * Math.PI) / 2)];
  return from.map((value, i) => a * value + b * to[i]);
}
