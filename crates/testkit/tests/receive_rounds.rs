//! Runs some rounds of `examples/send_rounds.rs --bed from-linux`.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use ubtrfs_testkit::{Rng, capability, receive_round};

#[test]
fn streams_of_linux_arrive_equal_with_equal_sharing() {
    if !capability::kernel_oracle() {
        return;
    }
    let seed = Rng::seed_or(1);
    for seed in seed..seed + 4 {
        println!("UBTRFS_SEED={seed}");
        println!("{}", receive_round(seed, 4, 150, None).unwrap());
    }
}
