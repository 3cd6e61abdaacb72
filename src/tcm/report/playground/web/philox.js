// Philox 4×64 with 10 rounds, as numpy computes it: random words that are a function of a key and a counter.

const WORD = (1n << 64n) - 1n;
const MULTIPLIERS = [0xd2e7470ee14c6c93n, 0xca5a826395121157n];
const KEY_STEPS = [0x9e3779b97f4a7c15n, 0xbb67ae8584caa73bn];
const ROUNDS = 10;

/** `count` 64-bit words of the stream that belongs to a seed; each draw from it has its own counters. */
export function philoxWords(seed, draw, count) {
  const words = new BigUint64Array(4 * Math.ceil(count / 4));
  for (let block = 0; 4 * block < count; block++) {
    // numpy counts before each block, so the first counter is 1.
    words.set(philoxBlock([BigInt(block + 1), 0n, 0n, BigInt(draw)], [seed & WORD, seed >> 64n]), 4 * block);
  }
  return words.subarray(0, count);
}

function philoxBlock(counter, key) {
  let [c0, c1, c2, c3] = counter;
  let [k0, k1] = key;
  for (let round = 0; round < ROUNDS; round++) {
    const left = MULTIPLIERS[0] * c0;
    const right = MULTIPLIERS[1] * c2;
    [c0, c1, c2, c3] = [(right >> 64n) ^ c1 ^ k0, right & WORD, (left >> 64n) ^ c3 ^ k1, left & WORD];
    k0 = (k0 + KEY_STEPS[0]) & WORD;
    k1 = (k1 + KEY_STEPS[1]) & WORD;
  }
  return [c0, c1, c2, c3];
}
