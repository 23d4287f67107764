//! tar archives of any compression, as `ubtrfs import` reads them: the sources of the reader themselves, which are part of a
//! program and of no library.
#![no_main]
#![allow(dead_code, unreachable_pub, unused_imports)]

#[path = "."]
mod offline {
    #[path = "../../crates/cli/src/commands/offline/archive/mod.rs"]
    mod archive;
    #[path = "../../crates/cli/src/commands/offline/text.rs"]
    mod text;

    use std::path::Path;

    /// Bytes of members that are looked at.
    const MAX_DATA: usize = 64 << 20;

    pub(super) fn read_all(archive: &Path) -> anyhow::Result<()> {
        let mut reader = archive::read::Reader::new(archive::input::Input::open(archive)?);
        let mut left = MAX_DATA;
        while let Some(member) = reader.next_member()? {
            reader.for_each_piece(&member, |_, piece| {
                left = left.checked_sub(piece.len()).ok_or_else(|| anyhow::anyhow!("enough"))?;
                Ok(())
            })?;
        }
        Ok(())
    }
}

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let path = std::path::PathBuf::from(format!("/dev/shm/ubtrfs-fuzz-{}.tar", std::process::id()));
    if std::fs::write(&path, data).is_ok() {
        let _ = offline::read_all(&path);
    }
});
