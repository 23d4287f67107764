//! Fuzz target: `import` of hostile archives into a good image, which must stay clean.

use std::cell::RefCell;
use std::fs;
use std::sync::{Arc, OnceLock};

use ubtrfs_device::{Access, FileDevice};
use ubtrfs_testkit::Medium;

use crate::{Scratch, run, words};

/// Runs one input: the first byte chooses options, the rest is an archive. The archive is imported twice, the second
/// time as a layer over the result of the first, so that whiteouts have something to remove.
pub fn import(data: &[u8]) {
    thread_local! {
        static SCRATCH: RefCell<Option<Scratch>> = const { RefCell::new(None) };
    }
    static EMPTY: OnceLock<Medium> = OnceLock::new();
    let Some((&first, archive)) = data.split_first() else { return };
    let mut archive = archive.to_vec();
    if first % 8 > 0 {
        seal(&mut archive);
    }
    if first / 64 > 2 {
        archive = compressed(&archive, first);
    }
    let empty = EMPTY.get_or_init(|| Medium::formatted(IMAGE_LEN, &Default::default()).expect("an image is made"));
    SCRATCH.with_borrow_mut(|scratch| {
        let scratch = scratch.get_or_insert_with(|| Scratch::new("import"));
        empty.save(&scratch.image()).expect("the image is written");
        fs::write(scratch.archive(), &archive).expect("the archive is written");
        let strip = if first / 8 % 4 == 0 { "1" } else { "0" };
        let (tar, at) = (scratch.archive(), scratch.at(b"/into"));
        run(&words!["import", "--memory", "64M", "--strip-components", strip, &tar, &at]);
        run(&words!["import", "--memory", "64M", "--strip-components", strip, "--oci-layer", &tar, &at]);
        scratch.check("an import");
        is_clean(scratch);
    });
}

/// Fixes the checksums of all headers.
fn seal(archive: &mut [u8]) {
    let mut at = 0;
    while let Some(header) = archive.get_mut(at..at + 512) {
        if header.iter().all(|byte| *byte == 0) {
            at += 512;
            continue;
        }
        header[148..156].fill(b' ');
        let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
        header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        let digits = header[124..136].iter().copied().filter(u8::is_ascii_digit);
        let size = digits.fold(0u64, |size, digit| size.wrapping_mul(8).wrapping_add(u64::from(digit & 7)));
        // Links and directories have no data, regardless of their size field.
        let has_data = !matches!(header[156], b'1'..=b'6');
        at += 512;
        if has_data {
            at = at.saturating_add(usize::try_from(size).unwrap_or(usize::MAX).saturating_add(511) & !511);
        }
    }
}

fn compressed(archive: &[u8], first: u8) -> Vec<u8> {
    use std::io::Write;
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    match first % 2 {
        0 => zstd::bulk::compress(archive, 1).unwrap_or_default(),
        _ => gzip.write_all(archive).and_then(|()| gzip.finish()).unwrap_or_default(),
    }
}

/// Fails unless the image is clean.
fn is_clean(scratch: &Scratch) {
    let device = FileDevice::open(&scratch.image(), Access::ReadOnly).expect("the image can be opened");
    let options = ubtrfs_check::Options { data_csums: true, ..Default::default() };
    let mut problems = Vec::new();
    ubtrfs_check::check(vec![Arc::new(device)], options, &(), &mut |problem| problems.push(problem.to_string()))
        .expect("the image can be checked");
    assert!(problems.is_empty(), "{problems:?}");
}

const IMAGE_LEN: u64 = 128 << 20;
