// BLAKE2b (RFC 7693) of a short text, without a key: one block of 128 bytes.

const MASK = (1n << 64n) - 1n;
const START = [
  0x6a09e667f3bcc908n,
  0xbb67ae8584caa73bn,
  0x3c6ef372fe94f82bn,
  0xa54ff53a5f1d36f1n,
  0x510e527fade682d1n,
  0x9b05688c2b3e6c1fn,
  0x1f83d9abfb41bd6bn,
  0x5be0cd19137e2179n,
];
const ORDERS = [
  [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
  [14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3],
  [11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4],
  [7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8],
  [9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13],
  [2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9],
  [12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11],
  [13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10],
  [6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5],
  [10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0],
];
const COLUMNS_AND_DIAGONALS = [
  [0, 4, 8, 12],
  [1, 5, 9, 13],
  [2, 6, 10, 14],
  [3, 7, 11, 15],
  [0, 5, 10, 15],
  [1, 6, 11, 12],
  [2, 7, 8, 13],
  [3, 4, 9, 14],
];

/** The digest of an ASCII text of at most 128 bytes, as a little-endian number of `size` bytes, a multiple of 8. */
export function blake2b(text, size) {
  const block = new DataView(new ArrayBuffer(128));
  for (let i = 0; i < text.length; i++) block.setUint8(i, text.charCodeAt(i));
  const message = Array.from({ length: 16 }, (_, i) => block.getBigUint64(8 * i, true));
  const state = [...START];
  state[0] ^= 0x01010000n ^ BigInt(size);
  const v = [...state, ...START];
  v[12] ^= BigInt(text.length);
  v[14] ^= MASK; // this block is the last
  for (let round = 0; round < 12; round++) {
    const order = ORDERS[round % 10];
    COLUMNS_AND_DIAGONALS.forEach((lane, i) => mix(v, lane, message[order[2 * i]], message[order[2 * i + 1]]));
  }
  return state.slice(0, size / 8).reduce((sum, word, i) => sum | ((word ^ v[i] ^ v[i + 8]) << BigInt(64 * i)), 0n);
}

function mix(v, [a, b, c, d], first, second) {
  for (const [word, turnD, turnB] of [
    [first, 32n, 24n],
    [second, 16n, 63n],
  ]) {
    v[a] = (v[a] + v[b] + word) & MASK;
    v[d] = rotated(v[d] ^ v[a], turnD);
    v[c] = (v[c] + v[d]) & MASK;
    v[b] = rotated(v[b] ^ v[c], turnB);
  }
}

function rotated(word, bits) {
  return ((word >> bits) | (word << (64n - bits))) & MASK;
}
