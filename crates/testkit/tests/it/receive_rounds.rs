//! Runs some rounds of `examples/send_rounds.rs --bed from-linux`.

use ubtrfs_testkit::{Rng, capability, receive_round};

#[test]
fn streams_of_linux_arrive_equal_with_equal_sharing() {
    if !capability::kernel_oracle() {
        return;
    }
    let seed = Rng::seed_or(1);
    let mut nr_judged = 0;
    for seed in seed..seed + 4 {
        println!("UBTRFS_SEED={seed}");
        let line = receive_round(seed, 4, 150, None).unwrap();
        println!("{line}");
        nr_judged += usize::from(!line.starts_with("not judged"));
    }
    assert!(nr_judged >= 3, "Linux received only {nr_judged} of 4 chains equal");
}
