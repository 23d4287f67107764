//! The counted work of typical operations grows no faster than the number of files, extents, block groups, snapshots,
//! subvolumes or links, or the size of the device.
//!
//! Method: each dimension of `testkit::Dimension` runs at its short size and at four times that size. Only counts are
//! compared: lookups of nodes, nodes made and written, and visits of lists of all block groups, chunks or trees. The
//! example `scale` of testkit compares processor time at larger sizes.

use ubtrfs_testkit::{Dimension, exponent};

/// Smaller counts count as this count.
const COUNT_MIN: u64 = 1000;
/// A quadratic count has the exponent 2. At these sizes, trees become a level higher between the two sizes, and lookups no
/// longer find their leaf in the hints of the thread, which gives exponents up to 1.3.
const EXPONENT_MAX: f64 = 1.4;
/// How often a count above the limit is taken again. Threads of writeback share lookups by chance, so a count differs by a
/// fifth between two runs; the lowest is nearest to the work.
const REPEATS: usize = 3;

#[test]
fn counted_work_grows_no_faster_than_its_size() {
    let mut above = Vec::new();
    for dimension in Dimension::ALL {
        let began = std::time::Instant::now();
        let runs = [1, 4].map(|factor| dimension.run(factor * dimension.short).expect("run"));
        for (stage, ((name, one), (_, four))) in runs[0].iter().zip(&runs[1]).enumerate() {
            let [one, mut four] = [one, four].map(|cost| cost.counted().max(COUNT_MIN));
            let growth = |four: u64| exponent(one as f64, four as f64, 4.0);
            for _ in 0..REPEATS {
                if growth(four) <= EXPONENT_MAX {
                    break;
                }
                let again = dimension.run(4 * dimension.short).expect("run");
                four = four.min(again[stage].1.counted().max(COUNT_MIN));
            }
            let grown = growth(four);
            println!("{}, {name}: {one}, {four}: {grown:.2}", dimension.name);
            if grown > EXPONENT_MAX {
                above.push(format!(
                    "{}, {name}: {one} at {}, {four} at 4 times that size",
                    dimension.name, dimension.short
                ));
            }
        }
        println!("{}: {:.1} s", dimension.name, began.elapsed().as_secs_f64());
    }
    assert!(above.is_empty(), "{above:#?}");
}
