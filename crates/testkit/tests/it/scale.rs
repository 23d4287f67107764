//! The counted work of typical operations grows no faster than the number of files, extents, block groups, snapshots,
//! subvolumes or links, or the size of the device.
//!
//! Method: each dimension of `testkit::Dimension` runs at its short size and at four times that size. Only counts are
//! compared: lookups of nodes, nodes made and written, and visits of lists of all block groups, chunks or trees. The
//! example `scale` of testkit compares processor time at larger sizes.

use ubtrfs_testkit::{Dimension, exponent};

/// Smaller counts count as this count. The sizes are tens of thousands, so such counts are far less than one for an operation.
const COUNT_MIN: u64 = 2000;
/// A quadratic count has the exponent 2. At these sizes, trees become a level higher between the two sizes, and lookups no
/// longer find their leaf in the hints of the thread, which gives exponents up to 1.3.
const EXPONENT_MAX: f64 = 1.4;

#[test]
fn counted_work_grows_no_faster_than_its_size() {
    let mut above = Vec::new();
    for dimension in Dimension::ALL {
        let began = std::time::Instant::now();
        let runs = [1, 4].map(|factor| dimension.run(factor * dimension.short).expect("run"));
        for ((name, one), (_, four)) in runs[0].iter().zip(&runs[1]) {
            let [one, four] = [one, four].map(|cost| cost.counted().max(COUNT_MIN));
            let grown = exponent(one as f64, four as f64, 4.0);
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
