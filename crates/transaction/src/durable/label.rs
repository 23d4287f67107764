//! Setting the label.

use ubtrfs_error::{Error, Result};
use ubtrfs_format::superblock::{LABEL_LEN_MAX, LABEL_SIZE};

use crate::engine::Engine;

impl Engine {
    /// Sets the label. A label has at most [`LABEL_LEN_MAX`] bytes, none of them zero. The label is durable on return.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if the label is too long or contains a zero; otherwise as for [`Engine::commit`].
    pub fn set_label(&self, label: &[u8]) -> Result<()> {
        if label.len() > LABEL_LEN_MAX || label.contains(&0) {
            let what = format!("a label of {} bytes", label.len());
            return Err(Error::Refused { what, hint: "choose a label of at most 255 bytes without zero bytes" });
        }
        self.check_writable()?;
        self.check_not_held()?;
        let mut field = [0; LABEL_SIZE];
        field[..label.len()].copy_from_slice(label);
        self.commit_state.note_label(field);
        self.commit()
    }
}
