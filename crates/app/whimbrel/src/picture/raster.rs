//! Canvas of pixels for plotters, written as a PNG file. Letters are bitmaps, so no font of the system is
//! needed.

use noto_sans_mono_bitmap::{FontWeight, RasterHeight, get_raster, get_raster_width};
use plotters_backend::{
    BackendColor, BackendCoord, BackendStyle, BackendTextStyle, DrawingBackend, DrawingErrorKind,
    FontTransform,
    text_anchor::{HPos, VPos},
};
use std::convert::Infallible;

/// Size above which a text has large letters.
const LARGE: f64 = 17.0;

/// Pixels, in rows, three bytes each.
pub(crate) struct Canvas {
    width: u32,
    height: u32,
    pixels: Vec<u8>,
}

impl Canvas {
    /// Creates a white canvas.
    pub(crate) fn new((width, height): (u32, u32)) -> Self {
        Self { width, height, pixels: vec![0xff; width as usize * height as usize * 3] }
    }

    /// Encodes the canvas as a PNG file.
    pub(crate) fn to_png(&self) -> Result<Vec<u8>, png::EncodingError> {
        let mut file = Vec::new();
        let mut encoder = png::Encoder::new(&mut file, self.width, self.height);
        encoder.set_color(png::ColorType::Rgb);
        encoder.set_depth(png::BitDepth::Eight);
        encoder.write_header()?.write_image_data(&self.pixels)?;
        Ok(file)
    }

    /// Mixes a colour into a pixel, unless the pixel is outside.
    fn mix(&mut self, (x, y): BackendCoord, color: BackendColor, alpha: f64) {
        let inside = (0..self.width as i32).contains(&x) && (0..self.height as i32).contains(&y);
        if !inside {
            return;
        }
        let at = (y as usize * self.width as usize + x as usize) * 3;
        let (red, green, blue) = color.rgb;
        for (old, new) in self.pixels[at..at + 3].iter_mut().zip([red, green, blue]) {
            *old = (f64::from(*old) * (1.0 - alpha) + f64::from(new) * alpha).round() as u8;
        }
    }
}

fn letters(size: f64) -> RasterHeight {
    if size > LARGE { RasterHeight::Size20 } else { RasterHeight::Size16 }
}

/// Maps a point of a rotated text to the canvas.
fn turned(transform: &FontTransform, (x, y): BackendCoord) -> BackendCoord {
    match transform {
        FontTransform::None => (x, y),
        FontTransform::Rotate90 => (-y, x),
        FontTransform::Rotate180 => (-x, -y),
        FontTransform::Rotate270 => (y, -x),
    }
}

impl DrawingBackend for &mut Canvas {
    type ErrorType = Infallible;

    fn get_size(&self) -> (u32, u32) {
        (self.width, self.height)
    }

    fn ensure_prepared(&mut self) -> Result<(), DrawingErrorKind<Infallible>> {
        Ok(())
    }

    fn present(&mut self) -> Result<(), DrawingErrorKind<Infallible>> {
        Ok(())
    }

    fn draw_pixel(
        &mut self,
        point: BackendCoord,
        color: BackendColor,
    ) -> Result<(), DrawingErrorKind<Infallible>> {
        self.mix(point, color, color.alpha);
        Ok(())
    }

    fn draw_text<S: BackendTextStyle>(
        &mut self,
        text: &str,
        style: &S,
        (x, y): BackendCoord,
    ) -> Result<(), DrawingErrorKind<Infallible>> {
        let size = letters(style.size());
        let (width, height) = self.estimate_text_size(text, style)?;
        let left = match style.anchor().h_pos {
            HPos::Left => 0,
            HPos::Center => -(width as i32) / 2,
            HPos::Right => -(width as i32),
        };
        let top = match style.anchor().v_pos {
            VPos::Top => 0,
            VPos::Center => -(height as i32) / 2,
            VPos::Bottom => -(height as i32),
        };
        let letter_width = get_raster_width(FontWeight::Regular, size) as i32;
        for (letter, from) in text.chars().zip((left..).step_by(letter_width as usize)) {
            // A character without a bitmap becomes a space.
            let Some(bitmap) = get_raster(letter, FontWeight::Regular, size) else { continue };
            for (row, line) in (top..).zip(bitmap.raster()) {
                for (column, ink) in (from..).zip(*line).filter(|(_, ink)| **ink > 0) {
                    let (right, down) = turned(&style.transform(), (column, row));
                    let alpha = style.color().alpha * f64::from(*ink) / 255.0;
                    self.mix((x + right, y + down), style.color(), alpha);
                }
            }
        }
        Ok(())
    }

    fn estimate_text_size<S: BackendTextStyle>(
        &self,
        text: &str,
        style: &S,
    ) -> Result<(u32, u32), DrawingErrorKind<Infallible>> {
        let size = letters(style.size());
        let width = get_raster_width(FontWeight::Regular, size) * text.chars().count();
        Ok((width as u32, size.val() as u32))
    }

    fn draw_rect<S: BackendStyle>(
        &mut self,
        from: BackendCoord,
        to: BackendCoord,
        style: &S,
        fill: bool,
    ) -> Result<(), DrawingErrorKind<Infallible>> {
        // The whole canvas is filled in this way too, so the rectangle is clipped first.
        let (left, right) = (from.0.min(to.0).max(0), from.0.max(to.0).min(self.width as i32 - 1));
        let (top, bottom) = (from.1.min(to.1).max(0), from.1.max(to.1).min(self.height as i32 - 1));
        for y in top..=bottom {
            for x in left..=right {
                if fill || y == from.1 || y == to.1 || x == from.0 || x == to.0 {
                    self.mix((x, y), style.color(), style.color().alpha);
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plotters::prelude::*;

    fn ink(canvas: &Canvas) -> usize {
        canvas.pixels.chunks(3).filter(|pixel| **pixel != [0xff; 3]).count()
    }

    #[test]
    fn text_is_drawn_where_it_fits_and_is_cut_where_it_does_not() {
        let drawn = |at: (i32, i32)| {
            let mut canvas = Canvas::new((100, 40));
            let area = (&mut canvas).into_drawing_area();
            area.draw(&Text::new("12 ms", at, ("sans-serif", 15).into_font())).unwrap();
            drop(area);
            ink(&canvas)
        };
        let whole = drawn((10, 10));
        assert!(whole > 50, "{whole} pixels are no text");
        assert!(drawn((90, 10)) < whole && drawn((500, 500)) == 0);
    }

    #[test]
    fn a_file_is_what_another_reader_takes_for_a_picture() {
        let mut canvas = Canvas::new((7, 5));
        (&mut canvas).draw_pixel((3, 2), BackendColor { alpha: 1.0, rgb: (1, 2, 3) }).unwrap();
        let file = canvas.to_png().unwrap();
        let mut reader = png::Decoder::new(std::io::Cursor::new(file)).read_info().unwrap();
        let mut pixels = vec![0; 7 * 5 * 3];
        let info = reader.next_frame(&mut pixels).unwrap();
        assert_eq!((info.width, info.height), (7, 5));
        assert_eq!(pixels[(2 * 7 + 3) * 3..][..3], [1, 2, 3]);
    }
}
